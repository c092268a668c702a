"""Who may do what: column locks, leases and leadership in ZooKeeper."""
