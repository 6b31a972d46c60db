"""A folder on any file system of Hadoop, through the JVM of Spark.

A file is created atomically in one of two ways, as Spark does for its own checkpoint:

* it is written aside and renamed without overwriting, where a rename is one step (HDFS, ABFS);
* in an object store, where a rename is a copy, and where Hadoop has no FileContext, which renames
  without overwriting, it is created under its name with a condition, and appears when its stream is
  closed; a stream that did not take all of it is aborted instead.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from py4j.protocol import Py4JError, Py4JJavaError, Py4JNetworkError
from pyspark.errors import IllegalArgumentException

from sparkonce.errors import ConfigurationError, DecisionUnknownError, LogUnavailableError
from sparkonce.failpoints import reach

if TYPE_CHECKING:
    from py4j.java_gateway import JavaGateway

ResultT = TypeVar("ResultT")

_OBJECT_STORES: Final = frozenset({"s3a", "s3", "s3n", "gs"})
_EXISTS: Final = ("FileAlreadyExistsException", "RemoteFileChangedException")
_MISSING: Final = "FileNotFoundException"
_NO_CONTEXT: Final = "UnsupportedFileSystemException"
_NO_HOST: Final = "UnknownHostException"
_LASTING: Final = (
    _NO_CONTEXT,  # no FileSystem for the scheme either
    "IllegalArgumentException",
    "URISyntaxException",
    "ClassNotFoundException",
    "AccessControlException",
    "AccessDeniedException",
)
"""What is wrong with the address, Hadoop's settings or our rights."""


class HadoopFolder:
    """A folder on a file system of Hadoop; see `sparkonce.txn_log.folder.Folder`.

    Args:
        root: URL of the folder.
        gateway: Py4J's way to the JVM.
        conf: Hadoop's configuration there.
        address: for messages; default: that of the checkpoint around it.

    Raises:
        ConfigurationError: the file system is not known there, or refuses us.
        LogUnavailableError: it does not answer now.
    """

    def __init__(self, root: str, gateway: JavaGateway, conf: Any, address: str = "") -> None:
        jvm: Any = gateway.jvm
        # Py4J asks the JVM for each part of a class's name, every time: a dozen round trips.
        self._path_class: Any = jvm.org.apache.hadoop.fs.Path
        self._to_string: Any = jvm.org.apache.commons.io.IOUtils.toString
        self._thread: Any = jvm.java.lang.Thread
        self._address = address or f"checkpoint:{root.rpartition('/')[0]}"
        try:
            self._root = self._path_class(root)
            self._fs = self._root.getFileSystem(conf)
            self._root = self._root.makeQualified(self._fs.getUri(), self._fs.getWorkingDirectory())
            self._base = str(self._root.toUri().getPath()).rstrip("/") + "/"
            is_store = str(self._fs.getUri().getScheme()) in _OBJECT_STORES
            self._context: Any = None if is_store else self._find_context(jvm, conf)
            rename = getattr(jvm.org.apache.hadoop.fs, "Options$Rename")
            self._no_overwrite = gateway.new_array(rename, 1)
            self._no_overwrite[0] = rename.NONE
        except (Py4JJavaError, IllegalArgumentException) as error:
            found = _classes(error)
            # HDFS calls a host whose name is not found now an illegal argument.
            is_lasting = any(name in found for name in _LASTING) and _NO_HOST not in found
            kind = ConfigurationError if is_lasting else LogUnavailableError
            raise kind(
                f"{root} cannot be used: {_said(error)}; check the address, and that Spark's own "
                "checkpoint works there"
            ) from None

    def _find_context(self, jvm: Any, conf: Any) -> Any:
        try:
            return jvm.org.apache.hadoop.fs.FileContext.getFileContext(self._root.toUri(), conf)
        except Py4JJavaError as error:
            if _NO_CONTEXT in _classes(error):
                return None
            raise

    @property
    def address(self) -> str:
        return self._address

    def create(self, name: str, text: str) -> bool:
        path = self._path(name)
        if self._context is None:
            return self._put(path, text)
        hidden = self._path_class(path.getParent(), f".{path.getName()}.{secrets.token_hex(8)}.tmp")
        try:
            self._try(lambda: self._write(self._fs.create(hidden, True), text))
            return self._decide(lambda: self._context.rename(hidden, path, self._no_overwrite))
        finally:
            with contextlib.suppress(Py4JError):
                self._fs.delete(hidden, False)

    def read(self, name: str) -> str | None:
        def read() -> str:
            stream = self._fs.open(self._path(name))
            try:
                return str(self._to_string(stream, "UTF-8"))
            finally:
                stream.close()

        return self._try(read, missing=None)

    def names(self, folder: str) -> Sequence[str]:
        def ask() -> list[str]:
            found, names = self._fs.listFiles(self._path(folder or "."), True), []
            while found.hasNext():
                path = str(found.next().getPath().toUri().getPath())
                names.append(path.removeprefix(self._base))
            return [name for name in names if not name.rpartition("/")[2].startswith(".")]

        return self._try(ask, missing=[])

    def delete(self, name: str) -> None:
        self._try(lambda: self._fs.delete(self._path(name), False))

    def _path(self, name: str) -> Any:
        return self._path_class(self._root, name)

    def _put(self, path: Any, text: str) -> bool:
        """With a condition: S3A's is asked for by its own option, others take `overwrite`."""
        if self._try(lambda: self._fs.exists(path)):
            return False

        def put() -> None:
            builder = self._fs.createFile(path).overwrite(False).recursive()
            builder = builder.opt("fs.option.create.conditional.overwrite", "true")
            self._write(builder.build(), text, close_publishes=True)

        return self._decide(put)

    @staticmethod
    def _write(stream: Any, text: str, *, close_publishes: bool = False) -> None:
        try:
            stream.write(text.encode())
            if not close_publishes:
                stream.hsync()
        except BaseException:
            with contextlib.suppress(Py4JError):
                stream.abort() if close_publishes else stream.close()
            raise
        stream.close()

    def _decide(self, action: Callable[[], object]) -> bool:
        """Run the step that makes the file appear; False when the file was there."""
        reach("log.before", request="commit file")
        try:
            action()
        except Py4JJavaError as error:
            self._go_on(error)
            if any(name in _classes(error) for name in _EXISTS):
                return False
            raise DecisionUnknownError(
                f"{self.address} failed while it was written to ({_said(error)}); read the log "
                "again"
            ) from None
        except Py4JNetworkError as error:
            raise DecisionUnknownError(
                f"{self.address}: the JVM did not answer ({error}); read the log again"
            ) from error
        return True

    def _try(self, action: Callable[[], ResultT], **missing: Any) -> ResultT:
        """Run what may be repeated, and is once where it was interrupted."""
        try:
            try:
                return action()
            except Py4JJavaError as error:
                if not self._go_on(error):
                    raise
                return action()
        except Py4JJavaError as error:
            self._go_on(error)
            if missing and _MISSING in _classes(error):
                answer: ResultT = missing["missing"]
                return answer
            raise LogUnavailableError(
                f"{self.address} cannot be used now ({_said(error)}), nothing was written; check "
                "that Spark's own checkpoint works there"
            ) from None
        except Py4JNetworkError as error:
            raise LogUnavailableError(
                f"{self.address}: the JVM does not answer ({error}), nothing was written"
            ) from error

    def _go_on(self, error: Py4JJavaError) -> bool:
        """Let the next call of this thread through, after one that was interrupted; was it?

        Spark's `stop()` interrupts the thread once, and Hadoop's clients set the sign again: each
        further call would fail until the patience of whoever asks is over.
        """
        is_interrupted = "Interrupt" in _classes(error)  # ClosedByInterruptException is one, too
        if is_interrupted:
            self._thread.interrupted()
        return is_interrupted


def _classes(error: Py4JJavaError | IllegalArgumentException) -> str:
    """Names of the exception's class and of those of its causes."""
    if isinstance(error, IllegalArgumentException):  # PySpark's own; the text names the cause
        return f"{type(error).__name__} {error}"
    names, exception = [], error.java_exception
    while exception is not None:
        names.append(str(exception.getClass().getName()))
        exception = exception.getCause()
    return " ".join(names)


def _said(error: Py4JJavaError | IllegalArgumentException) -> str:
    is_java = isinstance(error, Py4JJavaError)
    text = str(error.java_exception.toString() if is_java else error)
    return text.splitlines()[0] if text else type(error).__name__
