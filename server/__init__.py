"""Tablet servers and their client over Arrow Flight, and the local cluster."""
