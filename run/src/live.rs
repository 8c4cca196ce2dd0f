//! Live: what the cache does for a program, on the terminal while it runs.
//!
//! ```text
//!   | ...the program's output scrolls here...      |   rows 1 to n - 7: the terminal's scrolling region
//!   |$ _                                            |
//!   |- quinion: grep -c the FILE --------- 00:12 -  |   the last rows are the panel's
//!   | hits       97.3 %  ########--                 |   screen    the region, set and given back
//!   | served     1.2 GiB/s ...                      |   panel     numbers become cells
//!   | ...                                           |   paint     cells become bytes
//! ```
//!
//! The program keeps its terminal: it has this process's standard streams, writes whenever it likes, and its output
//! scrolls and stays. Only the last rows are taken from it, by the terminal's own means. The panel reads no key, and
//! changes no mode of the terminal. Each picture is one write that saves and restores the cursor, and the kernel mixes
//! no two writes of a terminal.
//!
//! A program that uses the whole screen (an editor, a pager) sets the region for itself, and draws over the panel as
//! the panel does over it: the report serves better there.
//!
//! A thread draws; only it writes. When the program stops, the thread restores the rows until both continue.
//!
//! Invariants:
//!  1. Without a terminal on standard error there is no thread and no byte.
//!  2. However this process ends, the region is restored: by the thread, or after a kill by the repairer (`screen`).
//!
//! Not an invariant: that all the numbers of a picture are of one moment.

use std::path::PathBuf;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::{Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

use quinion::internals::arena::ArenaStats;
use quinion_owner::HotFile;
use quinion_owner::internals::serve::ViewerTotals;

use super::{OwnerNumbers, signals};

mod paint;
pub mod panel;
pub mod screen;

use panel::Panel;
use screen::Screen;
pub use screen::{REPAIR_VERB, repair_terminal};

const ROWS_FULL: u16 = 8;
/// The time from one picture to the next.
pub const PERIOD: Duration = Duration::from_millis(200);

#[derive(Clone, Debug, Default)]
pub(super) struct RunSample {
    /// Totals of the viewers so far.
    pub totals: ViewerTotals,
    /// The arena.
    pub stats: ArenaStats,
    /// The owner's numbers so far.
    pub owner: OwnerNumbers,
    /// The files that are read most, hottest first.
    pub hottest: Vec<HotFileSize>,
}

/// A file that is read often.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HotFileSize {
    /// The path by which a program opened it last.
    pub name: PathBuf,
    /// Bytes of it that are cached; `None` if no program has it open any more.
    pub cached_bytes: Option<u64>,
}

impl From<HotFile> for HotFileSize {
    fn from(file: HotFile) -> Self {
        Self { name: file.name, cached_bytes: file.cached_bytes }
    }
}

/// A panel on the terminal; dropping it restores the terminal.
pub(super) struct Live<'scope> {
    orders: Option<Sender<PanelCommand>>,
    thread: Option<ScopedJoinHandle<'scope, ()>>,
}

enum PanelCommand {
    /// Restore the rows, and answer when it is done.
    Hide(Sender<()>),
    Show,
}

impl<'scope> Live<'scope> {
    /// Starts to draw what `sample` returns, below `title`; `None` if the terminal cannot show it.
    pub(super) fn start<'env>(
        scope: &'scope Scope<'scope, 'env>,
        title: String,
        sample: impl Fn(usize) -> RunSample + Send + 'scope,
    ) -> Option<Self> {
        let mut screen = Screen::of_stderr(ROWS_FULL)?;
        let (orders, commands) = mpsc::channel();
        // The rows are taken before the program writes its first byte.
        let mut panel = Panel::new(title);
        let begun = Instant::now();
        screen.show(|area| panel.drawn(area, begun.elapsed(), sample(panel::files_in(area))));
        let draw = move || {
            // A terminal that stops background writers (`stty tostop`) would stop the owner, and with it the program.
            signals::block(signals::BACKGROUND_WRITE);
            draw(&mut screen, &commands, |area| {
                panel.drawn(area, begun.elapsed(), sample(panel::files_in(area)))
            });
        };
        let thread =
            std::thread::Builder::new().name("quinion-live".into()).spawn_scoped(scope, draw).ok()?;
        Some(Self { orders: Some(orders), thread: Some(thread) })
    }

    pub(super) fn hide(&self) {
        let (done, wait) = mpsc::channel();
        if self.send_command(PanelCommand::Hide(done)) {
            let _ = wait.recv(); // the thread is gone: then the rows are given back, too
        }
    }

    pub(super) fn show(&self) {
        self.send_command(PanelCommand::Show);
    }

    fn send_command(&self, order: PanelCommand) -> bool {
        self.orders.as_ref().is_some_and(|orders| orders.send(order).is_ok())
    }
}

impl Drop for Live<'_> {
    fn drop(&mut self) {
        drop(self.orders.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // that a picture could not be drawn is no reason to lose the program's status
        }
    }
}

/// Draws until the sender of orders is dropped.
fn draw(
    screen: &mut Screen,
    commands: &Receiver<PanelCommand>,
    mut picture: impl FnMut(ratatui::layout::Rect) -> ratatui::buffer::Buffer,
) {
    let mut hidden = false;
    loop {
        match commands.recv_timeout(PERIOD) {
            Ok(PanelCommand::Hide(done)) => {
                hidden = true;
                screen.hide();
                let _ = done.send(());
            }
            Ok(PanelCommand::Show) => hidden = false,
            Err(RecvTimeoutError::Timeout) if hidden => {}
            Err(RecvTimeoutError::Timeout) => screen.show(&mut picture),
            Err(RecvTimeoutError::Disconnected) => return screen.hide(),
        }
    }
}
