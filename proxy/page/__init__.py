"""The status page: what it shows, as HTML that needs no script, and the changes that a script fills in."""
