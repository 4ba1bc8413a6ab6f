"""S3: the stores, signing, endpoints and the service's answers."""
