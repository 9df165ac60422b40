"""Ways to run a call, one file each with `refuses(problem)` and `run(problem)`."""
