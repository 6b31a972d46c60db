"""How both clients reach the brokers: settings, security, and one connection per process.

refused     why a broker refuses us: the error, and the rights that the sink needs
oauth       the user's token function, as each client calls it
settings    the user's settings, as librdkafka and as kafka-python take them
access      why a connection was refused, and the next step
tls         TLS for kafka-python
quiet       filters for kafka-python's loggers
client      one kafka-python client, which reports a refusal instead of a timeout
outage      one log line when the brokers stop responding, and one when they respond again
connection  asks questions through that client, and repeats them while a failure is transient
"""
