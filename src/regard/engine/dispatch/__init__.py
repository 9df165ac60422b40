"""Choose who runs a call and say why: `choose`, `describe`, and placements over several devices."""
