"""A real Prometheus that scrapes a real Slotkeeper, and every query of every dashboard run against it (make observe)."""
