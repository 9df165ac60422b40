"""Floor 8. The calls of other libraries and formats, answered by Regard; import the module you need."""
