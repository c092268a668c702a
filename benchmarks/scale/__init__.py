"""The control plane at scale: ZooKeeper, many servers, many buckets, many owners; without data.

commits    owners that commit once a second, by the number of buckets; cuts; what is written
counting   a coordination store that counts what is asked of it, and what it tells
ensemble   three real ZooKeepers
leads      what a change costs each server, and how soon all buckets are led again
owners     processes of owners: a session and a lock each
servers    processes of simulated servers: a session each
simulated  tablet servers without data
"""
