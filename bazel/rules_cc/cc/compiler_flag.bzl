"""Nothing here is compiled."""
