"""Live servers, and which of them leads which bucket.

heartbeat  until when a session is certainly alive, and what time ZooKeeper has
leaders    which server leads which bucket: who should, and who does
picture    what a tablet server knows of its cluster, read where it changed
placement  which server should lead which bucket
presence   whether there is a cluster below a chroot, for those who are not to make one
servers    the live tablet servers, in ZooKeeper
"""
