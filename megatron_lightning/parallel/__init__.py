"""One file per dimension of parallelism; see the modules."""
