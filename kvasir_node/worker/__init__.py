"""The worker: serving the rows of the experts it holds, in its engine process."""
