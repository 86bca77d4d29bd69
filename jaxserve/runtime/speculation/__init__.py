"""Where drafts come from, on the device."""
