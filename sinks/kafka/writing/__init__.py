"""The executor's half: one Kafka transaction per task, flushed, marked and left open.

c_api        the functions and structures of librdkafka that are called
librdkafka   one transactional producer for whole record batches
advice       what to do about an error that librdkafka reports
reports      what librdkafka reports about one transaction
producer     one open transaction, from its beginning until it is prepared or abandoned
"""
