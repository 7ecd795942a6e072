"""Who holds which bytes of a device: the ledger, page tables, tiers, and what gives way. Pure."""
