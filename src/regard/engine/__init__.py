"""Floor 3. How one attention call is run; users never need to open it."""
