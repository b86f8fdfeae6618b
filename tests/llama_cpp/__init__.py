"""llama.cpp's own server tests, run against llama-server and then against Slotkeeper in front of it.

Nothing of llama.cpp lies here: its tests are taken out of the source at run time. `python -m tests.llama_cpp --help`.
"""
