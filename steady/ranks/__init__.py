"""Several processes: meeting, sharding, replicas, Muon, and a watchdog against hangs."""
