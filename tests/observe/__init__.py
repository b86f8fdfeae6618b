"""A real Prometheus that scrapes a real Slotkeeper, and every dashboard query run against it (make observe)."""
