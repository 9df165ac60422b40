"""Looking at attention: figures of what a model attends to."""
