"""Config files. Import as `rljax.configs`; `base` holds every default."""
