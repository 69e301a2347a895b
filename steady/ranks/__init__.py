"""Nobody waits in silence: how ranks meet, what each holds, replicas, Muon, the watchdog."""
