"""absl binaries, one a job."""
