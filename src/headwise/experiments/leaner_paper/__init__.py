"""What the leaner-transformers paper claims, one file each."""
