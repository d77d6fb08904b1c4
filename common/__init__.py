"""What the services share. Each subpackage states its charter."""
