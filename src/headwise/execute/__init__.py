"""Where work runs: in this process or in processes of this machine."""
