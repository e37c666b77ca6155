"""The HTTP server and the command line."""
