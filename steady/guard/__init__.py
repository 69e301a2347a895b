"""No step is lost: signals, non-finite steps, spikes, memory, crashes, how a command starts."""
