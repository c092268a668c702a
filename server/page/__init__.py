"""The status page: what the cluster is doing, live, for people. Read-only.

- `overview`: what there is now: servers, buckets, tables, locks, snapshots, leases
- `trends`: what has become of it lately: rates, times, and what owners of locks did
- `watcher`: looks again and again, while somebody looks at the page
- `questions`: the rows of a key that somebody asks the page for
- `site`: the page itself, its data, `/healthz` and `/readyz`, by HTTP
"""
