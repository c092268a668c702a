"""What the leader of a bucket does for writers, and for its snapshots.

fenced_writers   what a bucket's leader remembers of writers, and whom it refuses for it
led_bucket       a bucket and its leader's memory: the leader's side of the writer protocol
snapshot_keeper  a bucket's KV snapshots, as its leader keeps them: taken, listed, retired, freed
"""
