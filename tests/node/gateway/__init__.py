"""The gateway: pure parts by tables and properties, the server over streams in memory."""
