"""Floor 8. Speed and memory of attention, side by side with other libraries, and the tuning of a machine."""
