"""The built-in dashboard: one page, and the JSON that the page polls."""
