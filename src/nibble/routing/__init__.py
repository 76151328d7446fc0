"""Which replica serves a request: on the true prefix trees of all replicas, without torch and without HTTP."""
