"""How ranks that made the same call exchange what each of them holds."""
