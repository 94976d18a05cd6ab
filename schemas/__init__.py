"""What each artifact is: strict frozen models, canonical JSON, digests, refusals."""
