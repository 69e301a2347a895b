"""Time by phase, its growth and causes, resources, sinks and the report of a run."""
