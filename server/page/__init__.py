"""The status page: what the cluster is doing, live, for people. Read-only.

cluster_metrics  the state of the whole cluster, for Prometheus
of_cluster       the page of a cluster, served from outside of its servers
of_server        the page of a tablet server
overview         what there is now: servers, buckets, tables, locks, snapshots, leases
questions        the row of a key that somebody asks the page for
site             the page itself, its data, `/healthz` and `/readyz`, by HTTP
status_requests  asks all servers for their status, side by side
trends           what has become of it lately: rates, times, and what owners of locks did
watcher          looks again and again, while somebody looks at the page
"""
