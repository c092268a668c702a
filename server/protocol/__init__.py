"""What client and server have in common: what goes over the network.

calls          what calls have in common, and the calls about a server
definitions    a cluster's table: its definition, read as the merge engine's schema
environment    what the environment says of a cluster: where it is, and the secrets that open it
http_endpoint  answers by HTTP, for people and for Prometheus
messages       messages as values: frozen dataclasses whose fields say how they travel
puts           the calls that put, small or large
reads          the calls that read: look-ups, log ends, and the streams of scans and changelogs
security       who may call a server: the token, where one is required, and TLS
wire           bytes: requests and answers, errors, and the format that all of them say
writers        the calls of writers with a column lock, besides their puts
"""
