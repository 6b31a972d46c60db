"""The executor's half: one Kafka transaction per task, flushed, marked and left open.

c_api        the functions and structures of librdkafka that the sink uses
handle       librdkafka's producer as a handle: created, destroyed, its errors and its log
librdkafka   one transactional producer for whole record batches
advice       what to do about an error that librdkafka reports
reports      what librdkafka reports about one transaction
producer     one open transaction, from its beginning until it is prepared or abandoned
"""
