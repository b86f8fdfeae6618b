"""Stand-ins for what reality will not do on cue."""
