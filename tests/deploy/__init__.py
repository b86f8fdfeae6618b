"""What lies in deploy/ and compose.yaml, held against the programs that read it and the code that it names."""
