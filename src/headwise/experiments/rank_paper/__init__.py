"""The rank paper's figures and statements, one file each."""
