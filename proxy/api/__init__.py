"""One module per door of the proxy."""
