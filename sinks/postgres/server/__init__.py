"""The Postgres server: connections, SQL, identity, and what proves an outcome."""
