"""A folder on any Hadoop file system, through Spark's JVM.

A file is created atomically in one of two ways, as Spark does for its own checkpoint:

* Where a rename is one step (HDFS, ABFS), the file is written under a hidden name and renamed
  without overwriting.
* In an object store a rename is a copy, and some file systems have no FileContext, which renames
  without overwriting. There the file is created under its own name with a condition. It appears
  when its stream is closed; a stream that did not take the whole file is aborted instead.

Each call from Python to the JVM takes up to a millisecond, so every method makes few calls.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from py4j.protocol import Py4JError, Py4JJavaError, Py4JNetworkError
from pyspark import SparkContext
from pyspark.errors import IllegalArgumentException, PySparkRuntimeError
from pyspark.java_gateway import launch_gateway

from sparkonce.errors import ConfigurationError, DecisionUnknownError, LogUnavailableError
from sparkonce.failpoints import reach
from sparkonce.once import once
from sparkonce.storage.base import PIECE_BYTES

if TYPE_CHECKING:
    from py4j.java_gateway import JavaGateway

ResultT = TypeVar("ResultT")

_OBJECT_STORES: Final = frozenset({"s3a", "s3", "s3n", "gs"})
_EXISTS: Final = ("FileAlreadyExistsException", "RemoteFileChangedException")
_MISSING: Final = "FileNotFoundException"
_NO_CONTEXT: Final = "UnsupportedFileSystemException"
_NO_HOST: Final = "UnknownHostException"
_NO_CLASS: Final = "ClassNotFoundException"
_PERMANENT: Final = (
    _NO_CONTEXT,  # also raised if no FileSystem has the scheme
    "IllegalArgumentException",
    "URISyntaxException",
    _NO_CLASS,
    "AccessControlException",
    "AccessDeniedException",
)
"""The address, Hadoop's settings or our permissions are wrong."""

_BETWEEN_PATHS: Final = re.compile(r",(?=[A-Za-z][A-Za-z0-9+.-]*:/)")
"""Splits ``{file:/ckpt/commits/9,file:/ckpt/commits/10}``; no file name contains a slash."""


def hadoop_folder(
    root: str, address: str = "", conf: Callable[[], Any] | None = None
) -> HadoopFolder:
    """A folder, through the running Spark; without Spark, a JVM is started, which takes seconds.

    `conf` returns Hadoop's configuration; default: Spark's, including the Hadoop settings of
    spark-defaults.conf.
    """
    # Without Spark, one JVM serves all folders of the process, and ends with it.
    gateway = SparkContext._gateway or once(_own_jvm)  # noqa: SLF001 - py4j is the only way
    hadoop = (
        java_class(gateway.jvm, "org.apache.spark.deploy.SparkHadoopUtil").get().conf
        if conf is None
        else conf
    )
    return HadoopFolder(root, gateway, hadoop(), address)


def java_class(jvm: Any, name: str) -> Any:
    """A class of the JVM, by its whole name.

    Py4J asks the JVM for each part of ``jvm.org.apache…`` in turn, and the JVM looks for a class
    ``org`` in each of Spark's 300 jars: some ten milliseconds.
    """
    return getattr(jvm, name)


def _own_jvm() -> JavaGateway:
    try:
        return launch_gateway()
    except (OSError, PySparkRuntimeError) as error:
        raise ConfigurationError(
            f"no JVM can be started to read Hadoop's file systems ({error}): let this process find "
            "Java (JAVA_HOME) and Spark's bin/spark-submit (SPARK_HOME)"
        ) from error


class HadoopFolder:
    """A folder on a Hadoop file system; see `sparkonce.storage.base.FileSystemFolder`.

    `root` is its URL; `address` is for messages, and is the URL by default.

    Raises:
        ConfigurationError: Hadoop does not know the file system, or access is denied.
        LogUnavailableError: the file system does not respond now.
    """

    def __init__(self, root: str, gateway: JavaGateway, conf: Any, address: str = "") -> None:
        jvm: Any = gateway.jvm
        self._path_class: Any = java_class(jvm, "org.apache.hadoop.fs.Path")
        self._to_string: Any = java_class(jvm, "org.apache.commons.io.IOUtils").toString
        self._to_paths: Any = java_class(jvm, "org.apache.hadoop.fs.FileUtil").stat2Paths
        self._as_text: Any = java_class(jvm, "org.apache.commons.lang3.ArrayUtils").toString
        self._thread: Any = java_class(jvm, "java.lang.Thread")
        self._new_array = gateway.new_array
        self._address = address or root
        try:
            self._root = self._path_class(root)
            self._fs = self._root.getFileSystem(conf)
            self._root = self._root.makeQualified(self._fs.getUri(), self._fs.getWorkingDirectory())
            self._base = str(self._root.toUri().getPath()).rstrip("/") + "/"
            is_store = str(self._fs.getUri().getScheme()) in _OBJECT_STORES
            self._context: Any = None if is_store else self._find_context(jvm, conf)
            rename = java_class(jvm, "org.apache.hadoop.fs.Options$Rename")
            self._no_overwrite = gateway.new_array(rename, 1)
            self._no_overwrite[0] = rename.NONE
        except (Py4JJavaError, IllegalArgumentException) as error:
            found = _classes(error)
            # HDFS reports a host name that cannot be resolved now as an illegal argument.
            is_permanent = any(name in found for name in _PERMANENT) and _NO_HOST not in found
            kind = ConfigurationError if is_permanent else LogUnavailableError
            advice = "check the address, and that Spark's own checkpoint works there"
            if _NO_CLASS in found:
                advice = (
                    "put spark.jars.packages with the file system's jar, and its spark.hadoop.… "
                    "settings, into spark-defaults.conf, and let SPARK_CONF_DIR name its folder"
                )
            raise kind(f"{root} cannot be used: {_said(error)}; {advice}") from None

    def _find_context(self, jvm: Any, conf: Any) -> Any:
        try:
            contexts = java_class(jvm, "org.apache.hadoop.fs.FileContext")
            return contexts.getFileContext(self._root.toUri(), conf)
        except Py4JJavaError as error:
            if _NO_CONTEXT in _classes(error):
                return None
            raise

    @property
    def address(self) -> str:
        return self._address

    @property
    def location(self) -> str:
        return str(self._root.toString())  # a URI's text would be quoted

    def create(self, name: str, text: str) -> bool:
        return self._create(name, lambda: [text.encode()])

    def store(self, name: str, pieces: Callable[[], Iterable[bytes]]) -> None:
        if not self.exists(name):
            self._create(name, pieces)

    def _create(self, name: str, pieces: Callable[[], Iterable[bytes]]) -> bool:
        path = self._path(name)
        if self._context is None:
            return self._put(path, pieces)
        hidden = self._path_class(path.getParent(), f".{path.getName()}.{secrets.token_hex(8)}.tmp")
        try:
            self._try(lambda: self._write(self._fs.create(hidden, True), pieces()))
            return self._decide(lambda: self._context.rename(hidden, path, self._no_overwrite))
        finally:
            with contextlib.suppress(Py4JError):
                self._fs.delete(hidden, False)

    def read(self, name: str) -> str | None:
        return self._try(lambda: self._read(self._path(name)), missing=None)

    def read_end(self, name: str, most_bytes: int) -> str | None:
        def read() -> str:
            path = self._path(name)
            size = int(self._fs.getFileStatus(path).getLen())
            return self._read(path, max(0, size - most_bytes))

        return self._try(read, missing=None)

    def _read(self, path: Any, position: int = 0) -> str:
        stream = self._fs.open(path)
        try:
            if position:
                stream.seek(position)
            return str(self._to_string(stream, "UTF-8"))
        finally:
            stream.close()

    def pieces(self, name: str) -> Iterator[bytes] | None:
        stream = self._try(lambda: self._fs.open(self._path(name)), missing=None)
        return None if stream is None else self._pieces_of(stream)

    def _pieces_of(self, stream: Any) -> Iterator[bytes]:
        try:
            while True:
                with self._plain_errors():  # not repeated: the first try may have moved on
                    piece = bytes(stream.readNBytes(PIECE_BYTES))
                if not piece:
                    return
                yield piece
        finally:
            stream.close()

    def exists(self, name: str) -> bool:
        return self._try(lambda: bool(self._fs.exists(self._path(name))))

    def files(self, folder: str) -> Sequence[str]:
        """Includes the names of folders: to recognise them would take a call for each."""

        def ask() -> list[str]:
            # As a list: for one folder S3A returns S3AFileStatus[], which Py4J cannot pass on.
            folders = self._new_array(self._path_class, 1)
            folders[0] = self._path(folder)
            paths = self._to_paths(self._fs.listStatus(folders))
            text = str(self._as_text(paths))[1:-1]
            return [path.rpartition("/")[2] for path in _BETWEEN_PATHS.split(text) if path]

        return self._try(ask, missing=[])

    def names(self, folder: str) -> Sequence[str]:
        def ask() -> list[str]:
            where = self._path(folder)
            here = str(where.toUri().getPath())
            found, names = self._fs.listFiles(where, True), []
            while found.hasNext():
                path = str(found.next().getPath().toUri().getPath())
                if path == here:
                    raise LogUnavailableError(
                        f"{self.address}: {path} is a file where a folder should be; nothing was "
                        "written. Move the file away, and restore the folder"
                    )
                names.append(path.removeprefix(self._base))
            return [name for name in names if not name.rpartition("/")[2].startswith(".")]

        return self._try(ask, missing=[])

    def delete(self, name: str) -> None:
        self._try(lambda: self._fs.delete(self._path(name), False))

    def _path(self, name: str) -> Any:
        return self._path_class(self._root, name) if name else self._root

    def _put(self, path: Any, pieces: Callable[[], Iterable[bytes]]) -> bool:
        """Create the file on a condition: S3A has its own option, others use `overwrite`."""
        if self._try(lambda: self._fs.exists(path)):
            return False

        def put() -> None:
            builder = self._fs.createFile(path).overwrite(False).recursive()
            builder = builder.opt("fs.option.create.conditional.overwrite", "true")
            self._write(builder.build(), pieces(), close_publishes=True)

        return self._decide(put)

    @staticmethod
    def _write(stream: Any, pieces: Iterable[bytes], *, close_publishes: bool = False) -> None:
        try:
            for piece in pieces:
                stream.write(piece)
            if not close_publishes:
                stream.hsync()
        except BaseException:
            with contextlib.suppress(Py4JError):
                stream.abort() if close_publishes else stream.close()
            raise
        stream.close()

    def _decide(self, action: Callable[[], object]) -> bool:
        """Run the step that makes the file appear; False if the file existed."""
        reach("log.before", request="commit file")
        try:
            action()
        except Py4JJavaError as error:
            self._clear_interrupt(error)
            if any(name in _classes(error) for name in _EXISTS):
                return False
            raise DecisionUnknownError(
                f"{self.address} failed during a write ({_said(error)}); read the log again"
            ) from None
        except Py4JNetworkError as error:
            raise DecisionUnknownError(
                f"{self.address}: the JVM did not respond ({error}); read the log again"
            ) from error
        return True

    def _try(self, action: Callable[[], ResultT], **missing: Any) -> ResultT:
        """Run an action that may be repeated; repeat it once if it was interrupted."""
        with self._plain_errors():
            try:
                try:
                    return action()
                except Py4JJavaError as error:
                    if not self._clear_interrupt(error):
                        raise
                    return action()
            except Py4JJavaError as error:
                if not missing or _MISSING not in _classes(error):
                    raise
                answer: ResultT = missing["missing"]
                return answer

    @contextlib.contextmanager
    def _plain_errors(self) -> Iterator[None]:
        try:
            yield
        except Py4JJavaError as error:
            self._clear_interrupt(error)
            raise LogUnavailableError(
                f"{self.address} cannot be used now ({_said(error)}), nothing was written; check "
                "that Spark's own checkpoint works there"
            ) from None
        except Py4JNetworkError as error:
            raise LogUnavailableError(
                f"{self.address}: the JVM does not respond ({error}), nothing was written"
            ) from error

    def _clear_interrupt(self, error: Py4JJavaError) -> bool:
        """Clear the thread's interrupt if it caused the error; return whether it did.

        Spark's `stop()` interrupts the thread once, but Hadoop's clients set the flag again. With
        the flag set, each further call would fail until the caller's patience ends.
        """
        is_interrupted = "Interrupt" in _classes(error)  # also ClosedByInterruptException
        if is_interrupted:
            self._thread.interrupted()
        return is_interrupted


def _classes(error: Py4JJavaError | IllegalArgumentException) -> str:
    """The class names of the exception and of its causes."""
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
