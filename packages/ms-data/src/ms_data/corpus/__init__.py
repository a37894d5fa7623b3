"""Raw corpora, local or remote: file discovery, format detection and document readers."""
