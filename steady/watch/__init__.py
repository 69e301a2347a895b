"""Since when and why: time by phase, sinks, slow-downs, what runs out, the report of a run."""
