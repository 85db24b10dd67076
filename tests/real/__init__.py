"""warmroute against real vLLM servers on a CPU: see README.md in this folder."""
