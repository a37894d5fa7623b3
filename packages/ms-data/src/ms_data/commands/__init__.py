"""The subcommands that clean and deduplicate, each a skin over one public function."""
