"""Security settings of a client."""

from __future__ import annotations

SASL = {
    "security.protocol": "sasl_ssl",
    "sasl.mechanism": "SCRAM-SHA-512",
    "sasl.username": "writer",
    "sasl.password": "hunter2",
    "ssl.ca.location": "/ca.pem",
    "ssl.key.password": "letmein",
}
