"""How both clients reach the brokers: settings, security, and one connection per process.

refused     why a broker refuses us: the error, and the rights that the sink needs
oauth       the user's token function, as each client calls it
settings    what the user wrote, as librdkafka and as kafka-python take it
access      a refused connection in words that name the next step
tls         TLS for kafka-python
quiet       what kafka-python's loggers must not say
client      one kafka-python client, which reports a refusal instead of a timeout
outage      one log line when the brokers stop responding, and one when they respond again
connection  asks questions through that client, again while a failure is transient
"""
